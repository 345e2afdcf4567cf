"""What helps to test kernels; nothing else in the package imports it."""
