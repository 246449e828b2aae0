"""Local web server that shows all runs of a folder."""
