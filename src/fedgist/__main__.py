"""`python -m fedgist` is `fedgist`."""

from fedgist.cli import main

main()
