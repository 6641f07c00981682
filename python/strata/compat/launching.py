"""What ``accelerate launch`` reads of DeepSpeed's launcher. Ranks are started by torchrun: ``strata run``."""

import os

# A file of environment variables for the other nodes: the name that it has in the working or home folder.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
