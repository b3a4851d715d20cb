"""A gang is a group of ranks that serve one pipeline: started, fed, watched and ended together."""
