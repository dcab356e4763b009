"""Reports on a finished run: the HTML page, tables and figures."""
