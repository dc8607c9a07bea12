"""Generated stubs of package inference."""
