"""The ground floor: logging, command lines, configs, files, paths, fingerprints, ORT sessions. Knows no kernels."""
