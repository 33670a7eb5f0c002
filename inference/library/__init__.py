"""Public Python interface: `Predictor` answers all questions about models on one target."""
