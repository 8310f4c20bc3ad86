"""Tries other plans in the first steps of a fit and keeps what is faster beyond noise."""
