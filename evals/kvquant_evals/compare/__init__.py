"""`kvquant compare`: one evaluation against an earlier one, for people and for CI."""
