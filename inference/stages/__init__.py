"""Where the stages of a network should run: plans over the processing units of a machine, their latency and throughput."""
