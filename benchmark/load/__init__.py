"""Other work on the device: what the stressor runs, how it is started, and how a GPU is shared through MPS."""
