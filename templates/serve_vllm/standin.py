"""Stands in for `vllm serve` where no GPU is: the same arguments, /health and /v1/completions, and no model.

Each node is one stage: node 0 sends a text through all stages in turn, as vLLM sends activations.
"""

import argparse
import json
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--node-rank", type=int, default=0)
parser.add_argument("--master-addr", default="127.0.0.1")
parser.add_argument("--master-port", type=int, default=29501)
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--headless", action="store_true", help="a stage without an HTTP port")
args, _ = parser.parse_known_args()


def serve_stage() -> None:
    """Answer node 0 until it closes the connection."""
    for _ in range(300):  # node 0 may start later
        try:
            link = socket.create_connection((args.master_addr, args.master_port))
            break
        except OSError:
            time.sleep(0.2)
    else:
        raise SystemExit("error: node 0 does not listen")
    with link, link.makefile("rw") as lines:
        for line in lines:
            lines.write(line.rstrip("\n") + f" > stage {args.node_rank}\n")
            lines.flush()


class Handler(BaseHTTPRequestHandler):
    def answer(self, content: dict) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        self.answer({"status": "ready", "model": args.model, "nodes": args.nnodes})

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"] + " > stage 0"
        for stage in stages:
            stage.write(text + "\n")
            stage.flush()
            text = stage.readline().rstrip("\n")
        self.answer({"choices": [{"text": text}]})


if args.headless:
    serve_stage()
else:
    with socket.create_server(("", args.master_port)) as server:
        stages = [server.accept()[0].makefile("rw") for _ in range(args.nnodes - 1)]
    print(f"ready: {args.nnodes} nodes, port {args.port}", flush=True)
    ThreadingHTTPServer(("", args.port), Handler).serve_forever()
