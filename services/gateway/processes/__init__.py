"""Several gateway processes behind one port: `parent` starts, watches and ends them, `child` is what each knows."""
