PARTS = ("lint",)


def run(places, console, *, only, expression):
    return 0
