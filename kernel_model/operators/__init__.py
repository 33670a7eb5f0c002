"""Small models of operators of drawn sizes, for runtimes that fuse operators themselves."""
