"""Membership protocol by which the hosts of an elastic run agree on the participating hosts."""
