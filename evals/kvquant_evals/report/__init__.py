"""`kvquant report`: a saved evaluation as a page with plots, and as a Markdown table."""
