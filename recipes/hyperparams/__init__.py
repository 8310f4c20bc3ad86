"""Searches over hyper-parameters and the study of the paper's claims."""
