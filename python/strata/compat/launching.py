"""The names of DeepSpeed's launcher that ``accelerate launch`` reads. ``strata run`` starts ranks with torchrun."""

import os

# The name of a file with environment variables for other hosts, in the working folder or the home folder.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
