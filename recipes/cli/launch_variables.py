"""What Lightning's launcher and `seed_everything` leave in the environment of the process that starts the others."""

LAUNCH_VARIABLES = (
    *("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)
