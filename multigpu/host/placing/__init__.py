"""From what a node asks for to a placed component."""
