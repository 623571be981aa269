"""Health checks: pure functions that turn the facts of nodes into findings.

    facts (agent.facts.collect_facts, one per node)  +  HealthSettings (the `health` section of the cluster file)
        -> judge.judge_node, judge.judge_cluster  ->  Finding...  ->  judge.verdict

No function of this package does I/O or reads a clock.
"""
