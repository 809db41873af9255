"""The rules that twins do without. Each names what the product has against a fault; nothing of it is a setting."""

from __future__ import annotations

from tests.chaos.sabotage import Cut

NOBODY_REQUEUES = Cut("services/scheduler/fleet.py", function="Fleet._clean_up_worker", body="return")
LEASES_NEVER_RUN_OUT = (
    Cut(
        "shared/lua/take_lease.lua", old="redis.call('SET', lease, owner, 'PX', lease_ms)",
        body="redis.call('SET', lease, owner)",
    ),
    Cut("shared/lua/take_lease.lua", old="redis.call('PEXPIRE', lease, lease_ms)", body=""),
    Cut("shared/sharing.py", function="is_member_dead", body="return lambda incarnation: False"),
)  # fmt: skip
NOBODY_RECONNECTS = Cut(
    "shared/runtime.py", function="forever", body="while not stop.is_set():\n    await step()"
)  # fmt: skip
NOBODY_CANCELS_ORPHANS = Cut("services/scheduler/fleet.py", function="Fleet._cancel_orphans", body="return")
NOBODY_READS_THE_LOG = Cut("services/gateway/open_request.py", function="OpenRequest.fall_behind", body="return")
NO_SCRIPT_IS_RELOADED = Cut(
    "shared/scripts.py", function="Scripts._run",
    body="""
        import hashlib
        digest = hashlib.sha1(self.source(name).encode()).hexdigest()
        if name not in self._scripts:
            self._scripts[name] = await self.redis.script_load(self.source(name))
        return await self.redis.evalsha(digest, 1, self.prefix, *args)
    """,
)  # fmt: skip
NOBODY_CLAIMS = Cut("services/scheduler/service.py", function="SchedulerService.claim", body="return")
ADMISSION_IS_NOT_REPEATED = Cut(
    "services/gateway/admitting.py", old="                except LOST as e:\n                    is_first = False\n",
    body="                except LOST as e:\n                    raise TimeoutError from e\n",
)  # fmt: skip
WORKERS_KEEP_WHAT_THEY_RAN = Cut("services/gpu_worker/service.py", function="WorkerService._end", body="return")
NOBODY_SEES_A_HANG = (
    Cut("services/gpu_worker/watchdog.py", function="Watchdog.check", body="self.check_thread()"),
    Cut("services/scheduler/worker_view.py", function="WorkerView.is_hung", body="return False"),
)
