"""Planning a retry: new units for the rows of a run that are dead letters (`docs/decisions/0006-retry-units.md`).

It knows the run directory; it generates nothing.
"""

from pipelines.batch.plan import Plan, Retry
from pipelines.batch.rundir import RunDirectory


def plan_retry(run: RunDirectory, plan: Plan) -> Plan:
    """Plan new units for all dead letters; from now on these units answer for those rows.

    Returns:
        `plan` with the new units behind its own, or as it is if there is no dead letter.

    Raises:
        RunInUse: another driver has planned a retry since `plan` was read.
    """
    superseded, committed = run.superseded(), run.committed()
    number = max(unit.unit for unit in plan.units)
    retries = []
    for unit in plan.units:
        if unit.unit in superseded or unit.unit not in committed:
            continue
        if rows := tuple(int(letter["id"]) - unit.first_id for letter in run.letters(unit.unit)):
            number += 1
            retries.append(Retry(unit=number, supersedes=unit.unit, rows=rows))
    if not retries:
        return plan
    run.add_retries(retries, number=plan.num_retries + 1)
    return plan.with_retries(retries)
