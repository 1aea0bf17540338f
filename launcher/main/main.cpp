#include "launcher/regather.h"

int main(int argc, char** argv) { return regather::main(argc, argv); }
