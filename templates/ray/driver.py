"""A driver: Ray runs its tasks on all nodes. It saves its progress, and a new attempt continues."""

import os
import time

import ray

ROUNDS, TASKS = 60, 4


@ray.remote
def estimate_pi(seed):
    """Return how many of 20,000 random points lie in the circle."""
    import random

    chance = random.Random(seed)
    return sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(20_000))


for _ in range(300):  # Ray is starting
    try:
        ray.init(address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", log_to_driver=False)
        break
    except ConnectionError:
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.5)
done, inside = 0, 0
if path := os.environ.get("CLUSTERCTL_RESUME_FROM"):
    with open(path) as file:
        done, inside = int(path.rpartition("-")[2]), int(file.read())
    print(f"resumed at round {done}", flush=True)
for number in range(done + 1, ROUNDS + 1):
    inside += sum(ray.get([estimate_pi.remote(number * TASKS + task) for task in range(TASKS)]))
    os.makedirs("checkpoints", exist_ok=True)
    with open("checkpoints/partial", "w") as file:
        file.write(str(inside))
    os.rename("checkpoints/partial", f"checkpoints/round-{number}")
    print(f"round {number}/{ROUNDS}  pi {4 * inside / number / TASKS / 20_000:.4f}", flush=True)
    time.sleep(0.2)
