"""Training of heads that draft: text that a model writes itself, what it computes on it, and the heads' fit to that."""
