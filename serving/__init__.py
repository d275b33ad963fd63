"""The command line and the server: requests in, text and measurements out."""
