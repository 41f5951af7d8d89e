"""A real S3 server (moto's) on this machine, in a process that can be stopped and started again.

It serves clients of Google Cloud Storage, too: their XML interface is that of S3 but for the signature, which moto does
not check. No emulator of Google's that pip has (gcp-storage-emulator, fake-gcs-server) has that interface.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.weight_sync_transports import free_address

BUCKET = "bucket"

SERVER = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app = DomainDispatcherApplication(create_backend_app)
signed = "AWS4-HMAC-SHA256 Credential=user/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"

def serve(environ, start):
    if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS"):
        environ["HTTP_AUTHORIZATION"] = signed
    return app(environ, start)

run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""


class S3Server:
    """Server of one empty bucket at `address`; `variables` are the environment of its clients."""

    def __init__(self, log: Path) -> None:
        self.address = free_address()
        self.variables = {
            "AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{self.address}", "GOOGLE_SERVICE_ACCOUNT": str(log.with_suffix(".json")),
        }  # fmt: skip
        account = {"gcs_base_url": f"http://{self.address}", "disable_oauth": True}
        secrets = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        log.with_suffix(".json").write_text(json.dumps(account | secrets))
        self._log = log
        self.start()

    def start(self) -> None:
        import boto3
        from botocore.exceptions import BotoCoreError

        port = self.address.rpartition(":")[2]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen([sys.executable, "-c", SERVER, port], stdout=log, stderr=log)
        client = boto3.client(
            "s3", endpoint_url=f"http://{self.address}", region_name="us-east-1", aws_access_key_id="user",
            aws_secret_access_key="secret",
        )  # fmt: skip
        deadline = time.monotonic() + 30.0
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                return
            except BotoCoreError:
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.1)

    def stop(self) -> None:
        """End the server; all it held is gone."""
        self._process.kill()
        self._process.wait()

    def environment(self, staging: Path) -> dict[str, str]:
        """Environment of a client's process whose runs are staged in `staging`."""
        return os.environ | self.variables | {"LONGHAUL_STAGING": str(staging)}
