"""Answers as pages: `--html FILE` of the commands in inference/ and of the evaluator."""
