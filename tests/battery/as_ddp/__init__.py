"""Public behavior of Lightning's trainer compared with `ddp`. The strategy's README lists all differences."""
