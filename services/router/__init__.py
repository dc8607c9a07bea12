"""The router: decides who serves, remembers answers, knows the fleet."""
