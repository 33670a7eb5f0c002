"""What is learned of language models beyond their runs."""
