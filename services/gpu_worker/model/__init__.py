"""The decoder as data: configuration, architectures, and one forward pass for all of them."""
