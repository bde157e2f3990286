"""How much is accepted: replay, walks of trees, intervals, parity."""
