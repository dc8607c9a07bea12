"""Ways to move pages, behind one interface."""
