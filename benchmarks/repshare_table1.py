"""Table 1 of Berdoz 2022: test accuracy of CL, FL, IL, FD and representation sharing, mean over clients, last round.

python benchmarks/repshare_table1.py --out results/table1.json                       # MNIST, 5 seeds, CPU
python benchmarks/repshare_table1.py --out results/table1.json --dataset cifar10 --seeds 1 --device cuda
"""

from repshare_cells import ROWS, TASKS, cell, parser, run_cells, summary

PUBLISHED = {
    "mnist": {
        "CL": (94.00, 94.00, 94.00), "FL": (92.64, 86.79, 70.06), "IL": (91.46, 85.26, 72.86),
        "FD": (94.45, 90.55, 77.90), "ours": (94.19, 90.63, 82.07),
    },
    "fashion-mnist": {
        "CL": (87.77, 87.77, 87.77), "FL": (89.79, 89.28, 88.21), "IL": (86.04, 83.61, 80.52),
        "FD": (87.17, 83.32, 79.44), "ours": (87.91, 84.44, 80.77),
    },
    "cifar10": {
        "CL": (66.15, 66.15, 66.15), "FL": (67.99, 59.18, 51.05), "IL": (59.85, 46.46, 38.51),
        "FD": (56.75, 44.91, 31.43), "ours": (63.49, 47.28, 37.78),
    },
}  # fmt: skip
CLIENTS = (2, 5, 10)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--dataset", default="mnist", choices=list(TASKS))
    options_parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), choices=CLIENTS)
    options_parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    options = options_parser.parse_args()
    cells = {}
    for row in options.rows:
        for clients in options.clients if row != "CL" else [10]:  # CL pools the data, whoever held it
            cells[f"{options.dataset}, N={clients}, {row}"] = cell(options.dataset, clients, row)
    results = run_cells(cells, options)
    print(f"\n| {options.dataset} | {' | '.join(f'N={n} | thesis' for n in options.clients)} |")
    print(f"|{'---|' * (1 + 2 * len(options.clients))}")
    for row in options.rows:
        columns = []
        for clients in options.clients:
            found = results.get(f"{options.dataset}, N={10 if row == 'CL' else clients}, {row}", [])
            published = PUBLISHED[options.dataset].get(row)
            columns += [summary(found), f"{published[CLIENTS.index(clients)]:.2f}" if published else "–"]
        print(f"| {row} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
