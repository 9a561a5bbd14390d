"""What people look at: the terminal display of a run, and tables of results."""
