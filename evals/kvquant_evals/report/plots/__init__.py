"""One file per plot: what of a report it shows, apart from how that is drawn."""
