"""What is checked and measured on a GPU. Start it by run.py."""
