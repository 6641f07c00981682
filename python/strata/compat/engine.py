"""``deepspeed.initialize``, and the class of its engines: Strata's, with further names that frameworks use."""

from operator import attrgetter

from .. import _C
from ..config_source import document_of
from ..engine import Engine
from ..start import initialize_as
from ..model.parameter import owner_of
from ..rank_logging import log_dist
from . import VERSION
from .config import settings_of
from .names import REFUSED_METHODS, refused_method
from .sharding import ParameterOffload


class DeepSpeedEngine(Engine):
    """``strata.Engine`` under the name that frameworks ask for. ``config`` is the configuration's dict as the script
    gave it, not the model's, which is ``engine.module.config``. At stage 3 ``optimizer`` has ``parameter_offload``; an
    engine without an optimizer has that object as ``optimizer``."""

    document = {}  # of the configuration
    sparse_tensor_module_names = frozenset()  # gradients are dense

    def __init__(self, tree, config, optimizer, *args, **kwargs):
        super().__init__(tree, config, optimizer, *args, **kwargs)
        if optimizer is not None:
            optimizer.zero_stage, optimizer.zero_precision = config.stage, config.dtype
        if config.stage == 3:
            offload = ParameterOffload(self.module)
            self.module.__dict__["ds_external_parameters"] = tuple  # a call returns (): Strata keeps no list of these
            if optimizer is None:
                self.optimizer = offload
            else:
                optimizer.parameter_offload = offload

    config = property(attrgetter("document"), doc="The dict of the configuration.")

    def log_level(self):
        """str or None: ``log_level`` as the configuration has it."""
        return self.document.get("log_level")

    @property
    def has_optimizer(self):
        """bool: whether this engine updates anything."""
        return not isinstance(self.optimizer, (type(None), ParameterOffload))

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """As Strata's. ValueError where ``save_dir`` is None or empty."""
        if not save_dir:
            raise ValueError(f"save_checkpoint: pass the folder for checkpoints; found {save_dir!r}")
        return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def destroy(self, keep_values=False):
        """Ends the engine; a second call does nothing. Sharded parameters stay with the model, as under DeepSpeed:
        another ``initialize`` of the same model takes them over. They end with the last reference to the model. With
        ``keep_values``, collective then, the model gets whole parameters of its own."""
        if not self.core.alive:
            return
        sharded = self._config.stage == 3 and self.world_size > 1
        if sharded and not keep_values and any(owner_of(p)[0] is self.core for p in self.module.parameters()):
            self.wait_for_checkpoint()
            return
        self.module.__dict__.pop("ds_external_parameters", None)
        super().destroy(keep_values)


for _name, _refusal in REFUSED_METHODS.items():
    setattr(DeepSpeedEngine, _name, refused_method(f"engine.{_name}", _refusal))


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
               config_params=None):
    """``strata.initialize`` in the form that frameworks expect: the engine is a ``DeepSpeedEngine``, and its ``config``
    is the given dict. Other arguments, results and errors are ``strata.initialize``'s.

    Args:
        args: a namespace whose ``deepspeed_config``, or ``deepscale_config`` (the older name), is used when no
            configuration is given.
        distributed_port: accepted for DeepSpeed's sake; the launcher sets MASTER_PORT.
        config_params: another name of ``config``.
    """
    of_arguments = (getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config"))
    given = next((c for c in (config, config_params, *of_arguments) if c is not None), None)
    if given is None:
        raise _C.ConfigError("deepspeed.initialize() needs a configuration: pass config=<dict, path or JSON text>")
    log_dist(f"DeepSpeed info: version={VERSION}; Strata's engine stands in its place", ranks=[0])
    document = document_of(given)
    result = initialize_as(DeepSpeedEngine, model, mpu, mesh_param, settings_of(document), optimizer, model_parameters,
                           training_data, lr_scheduler, collate_fn, dist_init_required)
    result[0].document = document
    return result
