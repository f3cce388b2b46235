# Draws hooks.svg from hooks.dat in the current folder: time and bytes of a bucket under each hook,
# relative to the plain all-reduce. Called by run.sh.
set terminal svg noenhanced size 1000,460 font "Helvetica,13" background "white"
set output "hooks.svg"
set title "examples/extras/comm_hooks.h: a bucket of 25 MiB, relative to the plain all-reduce" font ",15"
set style data histograms
set boxwidth 0.8
set style fill solid 0.9 border -1
set grid y lc rgb "#dddddd"
set xtics rotate by 30 right font ",11"
set bmargin 9
set style histogram clustered gap 1
set logscale y
set yrange [0.001:*]
set ylabel "relative to the plain all-reduce"
set key top left Left reverse samplen 1
plot "hooks.dat" using 2:xtic(1) title "time" lc rgb "#0072b2", \
     "" using 3 title "bytes" lc rgb "#e69f00", \
     1 with lines lc rgb "#000000" notitle
