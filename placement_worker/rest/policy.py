"""Decides the permissions of callers by oslo.policy, with Placement's rules under Placement's names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from bus.clock import Clock
from bus.service.settings import SettingsError
from placement_worker.rest.auth import Caller
from placement_worker.rest.config import PolicyConfig
from placement_worker.rest.routes import RESHAPE, ROUTES, USAGES

if TYPE_CHECKING:
    from oslo_policy import policy

# Verdicts are cached this long, so that oslo.policy is evaluated once for each caller and rule. A changed policy file
# takes effect after this time.
REFRESH_S = 2.0
MAX_CACHED = 10_000

_BASE = (
    ("admin_api", "role:admin", False, True),
    ("service_api", "role:service", True, True),
    ("admin_or_service_api", "role:admin or role:service", True, True),
    ("project_reader_api", "role:reader and project_id:%(project_id)s", True, False),
    (
        "admin_or_project_reader_or_service_api",
        "role:admin or rule:project_reader_api or role:service",
        True,
        True,
    ),
)
RULES = {
    **{route.rule: "rule:admin_or_service_api" for route in ROUTES if route.rule is not None},
    USAGES: "rule:admin_or_project_reader_or_service_api",
    RESHAPE: "rule:service_api",
}


class Policy:
    """Decides by rule, caller and target, and caches the decisions for REFRESH_S."""

    def __init__(self, config: PolicyConfig, clock: Clock) -> None:
        self._clock = clock
        self._enforcer = _enforcer(config)
        self._decisions: dict[tuple[str, Caller, str | None], bool] = {}
        self._until = 0.0

    def allows(self, rule: str, caller: Caller, project_id: str | None) -> bool:
        """Whether the rule allows the caller the operation. project_id: the project that the operation is about."""
        now = self._clock.monotonic()
        if now >= self._until or len(self._decisions) >= MAX_CACHED:
            self._decisions.clear()
            self._until = now + REFRESH_S
        key = (rule, caller, project_id)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = self._enforce(rule, caller, project_id)
        return decision

    def _enforce(self, rule: str, caller: Caller, project_id: str | None) -> bool:
        creds = {**asdict(caller), "roles": list(caller.roles)}
        target = {"project_id": project_id, "user_id": caller.user_id}
        # do_raise: a token of the wrong scope is refused like any other, without an exception of its own.
        return bool(self._enforcer.authorize(rule, target, creds, do_raise=False))


def _enforcer(config: PolicyConfig) -> policy.Enforcer:
    # Imported here and not above, because the import takes a third of a second, and only the serving command needs it.
    from oslo_config import cfg  # noqa: PLC0415
    from oslo_policy import opts, policy  # noqa: PLC0415

    conf = cfg.ConfigOpts()
    conf([], project="placement", default_config_files=[], default_config_dirs=[])
    opts.set_defaults(conf)
    if config.policy_file and not Path(config.policy_file).is_file():
        raise SettingsError("rest.policy_file", f"there is no policy file {config.policy_file}")
    conf.set_override("policy_file", config.policy_file or "berth-has-no-policy-file", "oslo_policy")
    # The default would also read /etc/placement/policy.d, whatever berth's settings name.
    conf.set_override("policy_dirs", [config.policy_dir] if config.policy_dir else [], "oslo_policy")
    conf.set_override("enforce_new_defaults", config.enforce_new_defaults, "oslo_policy")
    enforcer = policy.Enforcer(conf)
    enforcer.suppress_default_change_warnings = True
    enforcer.suppress_deprecation_warnings = True
    old = policy.DeprecatedRule(
        name="rule:admin_api",
        check_str="role:admin",
        deprecated_reason="Placement's defaults before its roles were refined.",
        deprecated_since="5.0.0",
    )
    for name, check, deprecates, scoped in _BASE:
        enforcer.register_default(
            policy.RuleDefault(
                name,
                check,
                scope_types=["project"] if scoped else None,
                deprecated_rule=old if deprecates else None,
            )
        )
    for name, check in RULES.items():
        enforcer.register_default(policy.RuleDefault(name, check, scope_types=["project"]))
    enforcer.load_rules()
    return enforcer
