"""The speculative decoder: accept rules, tree, loop, graphs."""
