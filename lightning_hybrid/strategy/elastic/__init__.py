"""`elastic=Elastic(...)`: a run that goes on when a host is lost, and takes in a host that comes."""
