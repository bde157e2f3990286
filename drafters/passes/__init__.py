"""What makes passes over few tokens fast: kernels for the CPU, built where they run."""
