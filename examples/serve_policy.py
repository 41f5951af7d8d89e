"""A trained policy as an HTTP server. Run: python examples/serve_policy.py RUN [PORT]

POST /act with {"observation": [[0.0, 0.0, 0.05, 0.0]]}, one or a batch of them, is answered by {"action": [1]}.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import longhaul


def server(run, port=8000):
    """Server of a run's policy; `serve_forever()` serves. Port 0 is any that is free."""
    policy = longhaul.load(run)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if self.path != "/act":
                return self.answer(404, {"error": f"{self.path} is not there; POST /act"})
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                action = policy.act_numpy(body["observation"])  # one observation or a batch
            except (KeyError, TypeError, ValueError) as error:  # the message says what the policy takes
                return self.answer(400, {"error": f"{type(error).__name__}: {error}"})
            return self.answer(200, {"action": action.tolist()})

        def answer(self, code, body):
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            """Nothing is logged."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    serving = server(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
    print("serving on port", serving.server_port, flush=True)
    serving.serve_forever()
