"""A run's figures as pages and tables, and where each comes from."""
