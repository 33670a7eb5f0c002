"""Apache TVM."""
