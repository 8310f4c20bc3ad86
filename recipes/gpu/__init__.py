"""What is checked on a machine with a GPU before anybody trusts it, each check in a process of its own."""
