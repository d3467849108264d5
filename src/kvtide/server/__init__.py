"""The server, and the page that shows what an engine does."""
