"""How fast decoding is on this machine's CPU, and what memory it takes: kvquant beside what else one could use."""
