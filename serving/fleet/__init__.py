"""Several servers behind one address: Ray Serve starts, replaces and scales them (extra `ray`)."""
