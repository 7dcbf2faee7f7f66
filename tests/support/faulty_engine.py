"""The engine process of a server, with the faults that `FAULTS` in the environment lists.

Run by a server in place of its engine.
"""

from __future__ import annotations

import logging
import os
import sys

from fault_injection import start_with_faults

from headstock_openai_server.engine.process_main import main

if __name__ == "__main__":
    exit_code = main(sys.argv[1:], start_with_faults(*os.environ["FAULTS"].split()))
    logging.shutdown()
    os._exit(exit_code)  # as the real one ends
