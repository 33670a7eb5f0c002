"""HTML pages of answers: `--html FILE` of the commands in inference/ and of the evaluator."""
